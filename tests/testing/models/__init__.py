"""Models that tests bring: small ones, unlike ones, and units made by hand."""
