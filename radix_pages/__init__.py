"""A radix-tree prefix cache that thinks in memory pages. Pure Python and numpy; knows neither torch nor SGLang."""
