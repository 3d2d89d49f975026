"""Copies of an adapter: as a plain LoRA, or without base weights.

base_weights     weights of a base model's folder, read one at a time or compared
strip            a copy of an adapter without base weights
convert          a plain LoRA of an adapter that was trained on a changed base
initial_weights  the initial weights of training on a changed base, read or computed
plain            a plain LoRA of a stored adapter, for engines that apply no more
"""
