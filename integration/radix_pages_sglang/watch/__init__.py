"""The page map: a local web page that shows the memory of a running server, live (`radix-pages watch`)."""
