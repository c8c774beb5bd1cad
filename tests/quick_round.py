"""`DeviceRound` in plain Python: drafted nodes and copies of the text itself, for tests of what is around it.

In Triton's interpreter a real round takes seconds.
"""

from graft.tree.device.round import MAX_TOKENS, DeviceRound


class QuickRound(DeviceRound):
    def propose(self, shape, columns, by_row, max_context, draft, stride=0):
        levels = []
        draft(lambda number, *level: levels.append([part.view(shape.rows, -1).tolist() for part in level]))
        columns[:, : shape.tokens], by_row[:] = 0, 0
        columns[4, : shape.tokens] = shape.rows
        for row in range(shape.rows):
            cap = int(self.inputs["caps"][row])
            if cap >= 0:
                self._write_row(columns, by_row, row, stride, [[part[row] for part in level] for level in levels])

    def _write_row(self, columns, by_row, row, stride, levels):
        slot, cap = int(self.inputs["table_rows"][row]), int(self.inputs["caps"][row])
        max_depth = int(self.inputs["max_depths"][row])
        text = self.texts.own[slot, : int(self.texts.lengths[slot])].tolist()
        worth = self._copies(text, max_depth)
        paths = [()]  # by number in the drafted tree
        likely = [1.0]
        for level in levels:
            for token, parent, q in zip(*level, strict=True):
                paths.append((*paths[parent], token))
                likely.append(likely[parent] * min(q, 0.99))
        for path, own in zip(paths[1:], likely[1:], strict=True):
            if own > 0 and len(path) <= max_depth:
                worth[path] = max(worth.get(path, 0.0), own)
        best = sorted(worth, key=lambda path: (-worth[path], len(path)))
        places = {(): 0}
        for path in best:
            if len(places) <= cap and path[:-1] in places:
                places[path] = len(places)
        for path, place in places.items():
            token = path[-1] if path else text[-1]
            numbers = (token, places[path[:-1]], place, len(path), row)
            for column, number in enumerate(numbers):
                columns[column, row * stride + place] = number
        for part, number in enumerate((row * stride, len(places), len(text) - 1, slot)):
            by_row[part, row] = number

    def _copies(self, text, max_depth):
        for end in range(len(text) - 2, 1, -1):
            if text[end - 1 : end + 1] == text[-2:]:
                following = text[end + 1 :][:max_depth]
                return {tuple(following[:count]): 0.8**count for count in range(1, len(following) + 1)}
        return {}

    def finish(self, shape, columns, by_row, chosen, successors, logits):
        for row in range(shape.rows):
            start, size, slot = int(by_row[0, row]), int(by_row[1, row]), int(self.inputs["table_rows"][row])
            tokens, parents = columns[:2, start : start + size].tolist()
            place, new = 0, []
            while place is not None and len(new) < MAX_TOKENS:
                new.append(int(chosen[start + place]))
                below = (p for p in range(1, size) if parents[p] == place and tokens[p] == new[-1])
                place = next(below, None)
            end = int(self.texts.lengths[slot])
            for number, token in enumerate(new):
                self.texts.own[slot, end + number] = token
            self.texts.lengths[slot] = end + len(new)
            self.found["counts"][row] = len(new)
