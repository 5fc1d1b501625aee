# An image for flow runs, coordinators and Prefect's worker: Rekindle and Prefect, no framework.
#   docker build -f docker/flow.Dockerfile -t rekindle-flow .
ARG BASE=python:3.12-slim
FROM ${BASE}

WORKDIR /opt/rekindle
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY rekindle ./rekindle
RUN python -m pip install --no-cache-dir --constraint constraints.txt '.[prefect,kubernetes,s3,worker]'

# Deployments name flows by their path (deploy/prefect/prefect.yaml, REKINDLE_IMAGE_ROOT).
RUN ln -s rekindle/flows flows && ln -s rekindle/tasks tasks \
    && ln -s rekindle/recovery recovery && ln -s rekindle/blocks blocks
COPY examples ./examples

# The copies of jobs' records; of a flow run's pod it is a volume (deploy/prefect).
ENV PYTHONUNBUFFERED=1 REKINDLE_HOME=/var/lib/rekindle
RUN useradd --uid 65532 --create-home rekindle && install -d -o rekindle /var/lib/rekindle
USER 65532
CMD ["rekindle", "--help"]
