"""From a GGUF file to a Hugging Face directory: the file's own form, then a family's names, shapes and tokenizer.

file            what is in it
family          which families are known; llama, gemma3: tensors and configuration of each
tokenizer       the vocabulary as tokenizer.json (sentencepiece: where it is one)
conversion      all of it, once, into a directory
"""
