"""What a run left behind, shown to a person: one HTML page that needs no network. Imports no torch."""
