# zerostd with torch for CPUs, and its demo: docker build -t zerostd . && docker run --shm-size 1g zerostd
# For GPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130, and run with --gpus all --ulimit memlock=-1.
FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch --index-url ${TORCH_INDEX}
WORKDIR /zerostd
COPY . .
RUN pip install --no-cache-dir '.[demo]' && zerostd --version
CMD ["sh", "-c", "torchrun --standalone --nproc-per-node 2 examples/digits.py && python examples/spill.py --steps 30 --out /tmp/demo"]
