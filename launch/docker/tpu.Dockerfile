# docker build -f launch/docker/tpu.Dockerfile -t jaxrl_llm:tpu .
#
# For hosts of TPU slices: launch/gke/tpu.yaml and launch/gke/xpk.sh run it.
FROM python:3.12-slim

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY jaxrl_llm jaxrl_llm
COPY configs configs
RUN pip install --no-cache-dir ".[tpu,math]"

ENV PYTHONUNBUFFERED=1

CMD ["python", "-m", "jaxrl_llm.train", "--config=configs/grpo.py"]
