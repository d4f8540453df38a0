"""One module for the files of each serving engine."""
