"""The families of encoders: one module each, as those of decoders. A family is named by the class
of transformers without a head.

bert        BERT, RoBERTa and XLM-RoBERTa
modernbert  ModernBERT
"""

MODEL = "Model"
CLASSES = (MODEL, "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
"""The ends of the names of classes that are served: their heads aside, they are one model."""
