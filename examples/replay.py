"""A replay buffer on disk: frames are written as they come, and batches are read ahead of their use.

    python examples/replay.py

The buffer is larger than the memory it may take. A store keeps it on disk, with the code that keeps optimizer states:
whole pages with checksums, written and read beside the loop. The exit code is 1 unless all is as it was written.
"""

import sys
import tempfile

import torch

import zerostd

NUM_FRAMES = 4096
FRAME = (64, 64)
BATCH_SIZE = 256


def frame(index: int) -> torch.Tensor:
    return torch.full(FRAME, index % 251, dtype=torch.uint8)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, zerostd.TierStore(budget={"disk_path": folder}) as store:
        replay = store.allocate("replay", (NUM_FRAMES, *FRAME), torch.uint8, tier="disk")
        recent = store.allocate("recent", (BATCH_SIZE, *FRAME), torch.uint8, tier="host")
        for start in range(0, NUM_FRAMES, BATCH_SIZE):
            batch = torch.stack([frame(index) for index in range(start, start + BATCH_SIZE)])
            replay.write(batch, slice(start, start + BATCH_SIZE), priority="background")
            recent.write(batch)  # read again at once, so it stays in memory
        num_wrong = 0
        starts = range(0, NUM_FRAMES, BATCH_SIZE)
        ahead = replay.read(slice(0, BATCH_SIZE), priority="prefetch")
        for start in starts:
            batch = ahead.wait()
            if start != starts[-1]:  # the next batch comes while this one is used
                following = start + BATCH_SIZE
                ahead = replay.read(slice(following, following + BATCH_SIZE), priority="prefetch")
            num_wrong += sum(not torch.equal(batch[i], frame(start + i)) for i in range(BATCH_SIZE))
        num_wrong += not torch.equal(recent.read().wait(), batch)
        for tier, counts in store.statistics().items():
            print(tier, counts)
        print(f"{'yes' if not num_wrong else 'NO'}: {NUM_FRAMES} frames are as they were written")
    if num_wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
