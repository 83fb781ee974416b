# docker build -f launch/docker/cuda.Dockerfile -t jaxrl_llm:cuda .
# docker run --gpus all --ipc host -v "$PWD/runs:/app/runs" jaxrl_llm:cuda python -m jaxrl_llm.train --config=configs/grpo.py
#
# CUDA, cuDNN and NCCL come with the packages of jax[cuda]; the host gives the driver.
FROM python:3.12-slim

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY jaxrl_llm jaxrl_llm
COPY configs configs
RUN pip install --no-cache-dir ".[cuda,math]"

# Arrays of a run are allocated by JAX alone; what it leaves is for NCCL's buffers.
ENV PYTHONUNBUFFERED=1 \
    XLA_CLIENT_MEM_FRACTION=0.92

CMD ["python", "-m", "jaxrl_llm.train", "--config=configs/grpo.py"]
