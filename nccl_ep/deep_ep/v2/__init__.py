"""DeepEP V2: ``ElasticBuffer``, and ``EPBuffer`` of V2.5."""
