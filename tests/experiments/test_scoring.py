"""What `experiments/speed/scoring.py` measures."""

from prescore.bench.records import measure
from prescore.registry import get_scorer, list_scorers
from prescore.scoring.kmeans import ClusteringScorer


def test_every_clustering_scorer_is_timed_and_every_study_becomes_a_table(load_script):
    scoring = load_script("speed/scoring.py")
    timed = {scorer.name for scorer in scoring.SCORERS.values()}
    assert {name for name in list_scorers() if issubclass(get_scorer(name), ClusteringScorer)} <= timed
    rows = scoring.plan_rows(scoring.STUDIES, 256, dim=8, repeats=1, seed=0, values=(2, 3))
    top_k, clusters, alone = scoring.tables([measure("speed", row) for row in rows])
    assert (top_k.columns[0], clusters.columns[0]) == ("top_k", "n_clusters")
    assert [row[0] for row in top_k.rows] == [row[0] for row in clusters.rows] == ["2", "3"]
    assert [row[1] for row in alone.rows] == ["exact", *scoring.SCORERS]
    assert alone.rows[0][3] == "100.00 %"
