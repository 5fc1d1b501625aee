"""The numbers of a cluster, as jobs and saved blocks have them in their forms."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Nodes = Annotated[int, Field(ge=1, description="Number of nodes.")]
ProcessesPerNode = Annotated[
    int, Field(ge=1, description="Ranks on each node, usually one per accelerator.")
]
MinNodes = Annotated[
    int,
    Field(
        ge=0,
        description="Least number of nodes that training may go on with when some are lost; 0: all "
        "of them are needed.",
    ),
]
Spares = Annotated[
    int,
    Field(
        ge=0,
        description="Nodes in reserve, each ready to take the place of a lost one at once.",
    ),
]
