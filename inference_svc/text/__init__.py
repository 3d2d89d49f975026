"""Text on both sides of the engine, which knows only token ids.

prompt         prompts of every form to token ids, off the event loop when they are long
chat_template  a model's chat template, bounded in time and size
tokenizer      a Hugging Face tokenizer, and facts about its vocabulary
no_tokenizer   stands for it where there is none: token ids in, token ids out
detokenizer    token ids to text, incrementally
stop           matches stop strings across tokens
pieces         the text and bytes of single tokens
"""
