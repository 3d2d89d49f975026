"""Text on both sides of the engine, which knows only token ids.

prompt             prompts of every form to token ids, off the event loop when they are long
encoder            the part of a tokenizer that encodes prompts, and the terms of a call
pair               two texts of one prompt, for cross-encoders
cut                prompts that are too long
chat               a conversation: its messages, and the calls of tools in them
answers            reads answers: text, thoughts and calls of tools
chat_template      a chat template, bounded in time and size
conversation       roles and system messages of a chat, and a check that none is lost
template_process   renders adapters' chat templates in processes of their own
tokenizer          a Hugging Face tokenizer, and facts about its vocabulary
adapter_tokenizer  the same with the tokens and the chat template of an adapter
text_model         a tokenizer's interface to the rest of the service
no_tokenizer       stands for it where there is none: token ids in, token ids out
detokenizer        token ids to text, incrementally
stop               matches stop strings across tokens
pieces             the text and bytes of single tokens
"""
