"""The controller: decides, has decisions carried out by agents, keeps the journal, and serves the API."""
