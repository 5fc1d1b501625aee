"""Serve the train flow: run its scheduled flow runs, each in its own process."""

from prefect.flows import EntrypointType

from rekindle import train

if __name__ == "__main__":
    train.serve(
        name="demo",
        description="Training runs that survive lost ranks, nodes and flow processes.",
        entrypoint_type=EntrypointType.MODULE_PATH,
        print_starting_message=False,
    )
