"""Engines sample completions and score tokens; `base` says what each must give."""
