import os,sys
os.environ["XLA_FLAGS"]="--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
import shardrules as sr
from tests.mutation.steps.frame import *
for s in steps("tuned"):
    if sys.argv[1] in s.name:
        b=s.build(**eval(sys.argv[2] if len(sys.argv)>2 else "{}"))
        p=sr.inspect(b.compiled,b.inputs,b.outputs)
        for r in p.collectives:
            if not r.is_expected or len(sys.argv)>3: print(r.kind,r.axes,r.shape,r.sent,r.times,r.what,r.moves,'|',r.reason,r.place)
        for f in sr.verify(b.compiled,b.inputs,b.outputs,large=LARGE): print(str(f)[:300])
