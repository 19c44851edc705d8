"""radix_pages for SGLang: the plugin that SGLang's `sglang.srt.plugins` entry-point group loads."""


def register() -> None:
    """Placeholder until the adapter lands."""
