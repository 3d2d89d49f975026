"""The results that a request can ask for beside its tokens: numbers and bytes, without torch.

base            parts and options of any kind, and how they travel: nobody in between opens them
logprobs        log probabilities of generated tokens, and of the most likely ones
scores          log probabilities of a prompt's tokens
routed_experts  the experts that tokens have chosen
embedding_rule  how a model embeds
chosen_logits   logits of a few tokens behind a prompt, by which a model judges it
classifier_rule  how a server classifies
class_logits    outputs of a classifier for a prompt
pooling         embeddings: hidden states of a prompt, pooled to one vector
"""
