"""Train an ensemble stage by stage: resumable, in mixed precision, on many devices."""
