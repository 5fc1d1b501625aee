"""Which files of the package take part in one fault: a trace of all processes of a job."""
