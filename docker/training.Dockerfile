# An image for a job's nodes: a framework, Rekindle, the training script.
#   docker build -f docker/training.Dockerfile -t train .
#   docker build -f docker/training.Dockerfile -t train --build-arg EXTRAS=s3 \
#       --build-arg BASE=<an image with CANN and torch_npu, of Ascend's hub> .
# BASE: with Python 3.10 or newer. EXTRAS: torch, unless BASE has it.
# docker/wheels: put wheels there that no registry has, such as those of MindIO, TaskD and the Elastic
# Agent of MindCluster.
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG EXTRAS=torch,s3

WORKDIR /opt/rekindle
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY rekindle ./rekindle
# A framework that the base has stays as it is: constraints would ask for another version.
RUN case ",${EXTRAS}," in \
      *,torch,*) python3 -m pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" ;; \
      *) python3 -m pip install --no-cache-dir ".[${EXTRAS}]" ;; \
    esac

COPY docker/wheels ./wheels
RUN find wheels -name '*.whl' -exec python3 -m pip install --no-cache-dir {} +

# Put your own code in its place; working_directory in the job is this folder.
WORKDIR /app
COPY examples/charlm ./
ENV PYTHONUNBUFFERED=1
CMD ["rekindle", "--help"]
