# The operator: docker build -f deploy/images/operator.Dockerfile -t ghcr.io/tandem-dpd/operator:0.1.0 .
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m venv /opt/tandem && /opt/tandem/bin/pip install --no-cache-dir ".[operator]"

FROM python:3.11-slim
COPY --from=build /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["tandem"]
CMD ["operator"]
