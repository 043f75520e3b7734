"""Records in; tables, plots and pages out."""
