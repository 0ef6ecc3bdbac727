# The service: docker build -t vitrail . && docker run --rm -p 8000:8000 -e VITRAIL_TOKEN=secret vitrail
# Your own model: docker run --rm -p 8000:8000 -v "$PWD/runs:/models:ro" vitrail pets=/models/pets
# If VITRAIL_TOKEN is set, requests need the header "Authorization: Bearer TOKEN"; leave it out only where the port is not reachable.
# For a smaller image without CUDA, give the package index of PyTorch's CPU builds: --build-arg PIP_EXTRA_INDEX_URL=…

FROM python:3.12-slim AS build
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
RUN python -m venv /opt/vitrail && /opt/vitrail/bin/pip install --no-cache-dir ".[serve]"

FROM python:3.12-slim
RUN useradd --uid 10001 --create-home vitrail
COPY --from=build /opt/vitrail /opt/vitrail
ENV PATH=/opt/vitrail/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=15s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=12)"]
ENTRYPOINT ["vitrail", "serve", "--host", "0.0.0.0"]
