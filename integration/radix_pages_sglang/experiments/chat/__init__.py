"""`radix-pages experiment chat`: multi-turn chat load on this cache and on SGLang's own, in turns."""
