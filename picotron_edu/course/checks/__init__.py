"""One file a chapter: `ch05.py` judges the exercises 5.1, 5.2, … of `exercises/05_*.ipynb`."""
