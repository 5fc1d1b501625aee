# An image for flow runs and coordinators: Rekindle and Prefect, no framework.
#   docker build -f docker/flow.Dockerfile -t rekindle-flow .
ARG BASE=python:3.12-slim
FROM ${BASE}

WORKDIR /opt/rekindle
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY rekindle ./rekindle
RUN python -m pip install --no-cache-dir --constraint constraints.txt '.[kubernetes,s3]'

# Deployments name flows by their path (prefect.yaml): set REKINDLE_IMAGE_ROOT to /opt/rekindle.
RUN ln -s rekindle/flows flows && ln -s rekindle/tasks tasks \
    && ln -s rekindle/recovery recovery && ln -s rekindle/blocks blocks
COPY examples ./examples

ENV PYTHONUNBUFFERED=1
RUN useradd --uid 65532 --create-home rekindle
USER 65532
CMD ["rekindle", "--help"]
