# posttrain on NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t posttrain:cuda .
# docker run --gpus all -v "$PWD:/home/trainer/run" -w /home/trainer/run posttrain:cuda train run.yaml
FROM python:3.12-slim-bookworm

# PyTorch's wheels bring CUDA with them. Triton compiles what starts its kernels when they first run.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends -y gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/posttrain
COPY constraints.txt README.md LICENSE ./
COPY packages packages
# More of the packages' extras: --build-arg EXTRAS=quantization,liger,vllm
ARG EXTRAS=quantization,liger
RUN pip install --no-cache-dir -c constraints.txt \
    ./packages/core ./packages/sft "./packages/rl[${EXTRAS}]" ./packages/seq2seq \
    && useradd --uid 1000 --create-home trainer

USER 1000
WORKDIR /home/trainer
ENTRYPOINT ["posttrain"]
CMD ["--help"]
