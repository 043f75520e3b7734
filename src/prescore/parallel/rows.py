from prescore.parallel.pieces import Piece
from prescore.config import Selected
from prescore.types import Outcome
def why_not_rows(piece: Piece, config: Selected) -> str:
    return "x"
def attend_by_rows(piece: Piece, config: Selected, *, explain: bool) -> Outcome:
    raise NotImplementedError
