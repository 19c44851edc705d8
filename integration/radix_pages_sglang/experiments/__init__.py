"""What users do with this product, one command each: an experiment measures, and `report` shows what it found."""
