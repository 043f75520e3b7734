"""The paper's planted model, claim by claim."""
