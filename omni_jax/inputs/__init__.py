"""Request inputs to token ids, patches and positions; token ids to text: tokenizer, chat templates, images, video."""
