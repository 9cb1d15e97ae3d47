"""A circle of files that need one another."""


def circle(graph: dict[str, set[str]]) -> str | None:
    """One of them, as "a -> b -> a"; None: there is none."""
    left = {node: {other for other in others if other in graph and other != node} for node, others in graph.items()}
    while done := {node for node, others in left.items() if not others}:
        left = {node: others - done for node, others in left.items() if node not in done}
    if not left:
        return None
    path = [min(left)]  # whoever is left needs another who is left, so a walk ends in a circle
    while (following := min(left[path[-1]])) not in path:
        path.append(following)
    return " -> ".join([*path[path.index(following) :], following])
