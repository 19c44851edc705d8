"""Does evicting scattered tokens free pages? A real model's choices, driven through real allocators."""
