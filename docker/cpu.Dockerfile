# posttrain without a GPU: docker build -f docker/cpu.Dockerfile -t posttrain:cpu .
FROM python:3.11-slim-bookworm

WORKDIR /opt/posttrain
COPY constraints.txt README.md LICENSE ./
COPY packages packages
# The second index has PyTorch without CUDA, a quarter of the size.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt \
    ./packages/core ./packages/sft ./packages/rl ./packages/seq2seq \
    && useradd --uid 1000 --create-home trainer

USER 1000
WORKDIR /home/trainer
ENTRYPOINT ["posttrain"]
CMD ["--help"]
