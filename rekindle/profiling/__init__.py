"""What ranks write down of where their time goes, and what that tells. Formats are TaskD's."""
