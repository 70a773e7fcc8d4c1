# A server or a device of a real fleet: `docker build -t anyfleet .`, then `docker run anyfleet --help`.
# docs/deploy.md, section 10. pip can be given other sources: --build-arg PIP_EXTRA_INDEX_URL=…
FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX_URL
WORKDIR /source
RUN pip install --no-cache-dir build
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src src
RUN python -m build --wheel --outdir /wheels

FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL
COPY constraints.txt /tmp/constraints.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /tmp/constraints.txt "$(ls /wheels/*.whl)[fleet]"
# Nothing runs as root. Volumes that are mounted here for the first time belong to this user, too.
RUN useradd --uid 10001 --create-home fleet \
 && install -d -o fleet -g fleet -m 0700 /fleet /runs /device \
 && install -d -o fleet -g fleet -m 0755 /handed /app
USER 10001:10001
WORKDIR /app
ENV ANYFLEET_CACHE=off PYTHONUNBUFFERED=1
ENTRYPOINT ["anyfleet"]
CMD ["--help"]
