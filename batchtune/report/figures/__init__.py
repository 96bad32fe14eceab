"""The figures of a result, as plotly draws them."""
