"""The loop that decides and has decisions carried out: journal, runs, the API."""
