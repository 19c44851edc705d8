"""What prefixes requests share: traces replayed through SGLang's caches and ours without a model."""
