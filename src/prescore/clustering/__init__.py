"""Points in, centres and labels out; knows metrics, never heads or attention."""
