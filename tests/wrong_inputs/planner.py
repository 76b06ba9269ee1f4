"""The core's own commands: plans, architectures, measurements, policies."""

from wrong_inputs.case import File, Wrong

PLAN = "synergy_core plan model=gpt-1.3b gpu=a100 gpus=8"
HEAD = "placement,local_bsz,step_time,sync_time\n"
ROWS = HEAD + "".join(f"{nodes},{batch},{0.1 + 0.001 * batch},0.02\n" for nodes in (1, 2, 11) for batch in (16, 64))
TIMES = "model,layers,hidden,heads,ffn,vocab,seq_len,gpu,n_gpus,global_batch,micro_batch,tp,pp,dp,iter_time_s\n"
TIME = "m,24,1024,16,4096,50257,1024,a100,8,64,1,2,2,2,1.5\n"
OF_STEPS = "cifar10/placements-t4.csv"


def plan(typed: str, *said: str) -> Wrong:
    return Wrong(f"synergy_core plan {typed}".strip(), said)


def more(typed: str, *said: str) -> Wrong:
    return Wrong(f"{PLAN} {typed}", said)


def compression(gpu: str, typed: str, *said: str) -> Wrong:
    return Wrong(f"synergy_core compression model=gpt-1.3b gpu={gpu} {typed}", said)


def architecture(content: File, *said: str) -> Wrong:
    return Wrong("synergy_core plan model=mine.yaml gpu=a100 gpus=8", said, {"mine.yaml": content})


def steps(content: File, *said: str) -> Wrong:
    return Wrong(f"synergy_core validate {OF_STEPS}", said, {OF_STEPS: content})


def step(row: str, *said: str) -> Wrong:
    return steps(HEAD + row + "\n", f"{OF_STEPS}, line 2", *said)


def times(before: str, after: str, *said: str) -> Wrong:
    return Wrong("synergy_core validate m.csv", said, {"m.csv": TIMES + TIME.replace(before, after, 1)})


CASES = [
    Wrong("synergy_core", ("COMMAND is missing",)),
    Wrong("synergy_core plam", ("unknown command 'plam'", "Did you mean 'plan'")),
    plan("", "is missing", "python -m synergy_core plan"),
    plan("gpt", "'gpt': expected key=value"),
    plan("model=gpt-175b", "gpu= is missing"),
    plan("model=gpt-9b gpu=a100 gpus=8", "Did you mean 'gpt-"),
    plan("model=gpt-1.3b gpu=a-100 gpus=8", "Did you mean 'a100'"),
    plan("model=gpt-1.3b gpu= gpus=8", "expected key=value"),
    plan("model=gpt-1.3b gpu=a100 gpus=0", "gpus=0: expected at least 1"),
    plan("model=gpt-1.3b gpu=a100 gpus=8..4", "the range is empty"),
    plan("model=gpt-1.3b gpu=a100 gpus=1..9999999", "counts; expected at most 65,536"),
    more("batch=99999999999999999999", "expected at most 10,000,000"),
    more("software=meg", "Did you mean 'megatron'"),
    more("network=25GB", "such as 25e9"),
    more("tensor=3", "tensor=3 does not divide the model's 32 heads; choose one of 1, 2, 4"),
    more("zero=9", "expected 0, 1, 2 or 3"),
    more("pipeline=1000", "the model has 24 layers; choose at most that"),
    more("data=5", "does not divide the batch of 512"),
    more("link=infinityfabric", "unknown link 'infinityfabric'"),
    more("price=2", "give tokens= too, such as tokens=15T"),
    more("tokens=many", "tokens=many: expected tokens, such as 300B or 15T"),
    more("tokens=1B price=1,2", "2 prices for 1 GPU types"),
    more("constants=none.yaml", "none.yaml: cannot be read"),
    more("--emit helm x.yaml", "unknown form of a plan 'helm'"),
    plan("model=resnet-50 gpu=h100 gpus=8 tokens=1B", "resnet-50 does not read tokens"),
    more("tensr=2", "Did you mean 'tensor'"),
    more("--json .", ".: is a folder; expected the name of a file to write"),
    more("--picture x.png", "give a name that ends in .svg"),
    plan("model=nowhere.yaml gpu=a100 gpus=8", "nowhere.yaml: cannot be read (No such file or directory)"),
    architecture("", "mine.yaml: is empty"),
    architecture("[]", "mine.yaml: holds a list"),
    architecture("a: [", "mine.yaml: is not YAML: line 1"),
    architecture("a: b\n".encode("utf-16"), "mine.yaml: is no UTF-8 text; save it as UTF-8"),
    architecture(None, "mine.yaml/config.json: cannot be read (No such file or directory)"),
    architecture("1: 2\n", "the key 1 is a number"),
    architecture("family: transformer\nlayers: 24\n", "missing"),
    Wrong("synergy_core compression", ("is missing",)),
    compression("a100", "gpus=16,32", "expected a whole number"),
    compression("a100", "gpus=16 network_gbps=fast", "or nvlink"),
    compression("t4", "gpus=8 network_gbps=nvlink", "give Gb/s"),
    compression("a100", "gpus=16 compressor=zip", "unknown compressor 'zip'"),
    compression("a100", "gpus=16 batch=32 max_batch=16", "at least batch, 32"),
    compression("a100", "gpus=16 bandwidth=1", "unknown setting 'bandwidth'"),
    Wrong("synergy_core check", ("NAME is missing",)),
    Wrong("synergy_core check fif", ("Did you mean 'fifo'",)),
    Wrong("synergy_core check fifo --module nope", ("--module nope: no such module here",)),
    Wrong("synergy_core validate", ("FILE is missing",)),
    Wrong("synergy_core validate nowhere.csv", ("nowhere.csv: cannot be read (No such file or directory)",)),
    Wrong("synergy_core calibrate .", ("cannot be read (Is a directory)",)),
    steps("", "is empty; expected a header line and rows"),
    steps(HEAD, "has a header but no rows"),
    steps(ROWS.encode("utf-16"), "is not a text CSV file"),
    steps(ROWS.replace("step_time", "steptime"), "called 'steptime'? Rename it, if it is in seconds."),
    step("1,16,abc,0", "column step_time: got 'abc', expected a positive number of seconds"),
    step("1,16,0.5,-1", "column sync_time: got '-1', expected seconds, 0 or more"),
    step("1,8.5,0.5,0.1", "column local_bsz: got '8.5', expected a whole number"),
    step("40,16,0.5,0.1", "column placement: got '40', expected one digit from 1 to 9 per node"),
    steps(ROWS.replace("local_bsz", "local_bs"), "expected a column 'local_bsz'"),
    steps(ROWS.replace("step_time", "step_time_days"), "unknown unit 'days'"),
    steps(ROWS.replace("local_bsz", "placement"), "column 'placement' occurs 2 times"),
    steps(ROWS.replace("placement", "num_nodes"), "expected a column 'num_replicas'"),
    step("1,16", "got 2 cells, expected 4 as in the header"),
    step("1,16,1,2", "step_time, 1"),
    Wrong("synergy_core validate x.csv", ("no known format has the columns 'a', 'b'",), {"x.csv": "a,b\n1,2\n"}),
    Wrong(f"synergy_core validate {OF_STEPS} --form zzz", ("unknown form 'zzz'",), {OF_STEPS: ROWS}),
    times("m,24", "m,0", "m.csv, line 2, column layers: got '0'"),
    times("1024,16", "1024,7", "got tp 2, expected a divisor of heads 7. Fix tp or heads."),
]
