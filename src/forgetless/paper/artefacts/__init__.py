"""The artefacts, one file each; `registry` has the list."""
