import sys
from tests.support.rank_processes import Ranks
def job(pg, *a):
    import logging; logging.disable(logging.CRITICAL)
    from tests.support.jobs import divided_transformers as J
    import tests.support.divided_transformers as D
    name, stages, size, steps, drop = a
    if not drop:
        old = J.model_of
        def model_of(case):
            m = old(case)
            import torch
            for x in m.modules():
                if isinstance(x, torch.nn.Dropout): x.p = 0.0
                if hasattr(x, "attention_dropout"): x.attention_dropout = 0.0
                if type(getattr(x,"dropout",None)) is float: x.dropout = 0.0
            return m
        J.model_of = model_of
    c = J.Training(name, "eager", "1f1b", stages, size, steps)
    try: return J.trained(pg, c), J.looped(c)
    finally:
        if not drop: J.model_of = old
if __name__ == "__main__":
    r = Ranks(4)
    for a in eval(sys.argv[1]):
        print(a, *r.run(a[1]*a[2], job, *a, timeout_s=60)[0], flush=True)
    r.close()
