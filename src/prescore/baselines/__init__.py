"""What users would pick instead, behind the same call shape; never imported by attention."""
