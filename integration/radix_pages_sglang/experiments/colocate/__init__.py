"""Two models share one memory budget while their bursts alternate: by replay, and as two real servers."""
