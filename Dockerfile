# rowstep in an image: the tested stack from the lock, the wheel, one user without rights.
#
#   docker build --tag rowstep .
#   docker run --rm --volume rowstep:/home/rowstep/.rowstep rowstep run quickstart.yaml
#
# BASE must bring Python 3.10 and glibc 2.36 or newer. The compiler serves the few packages that
# come as source; it stays in the first stage.
ARG BASE=python:3.10-slim-bookworm

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/tfx-1.16-py310.txt requirements/
RUN python3.10 -m venv /opt/rowstep \
 && /opt/rowstep/bin/pip install --no-cache-dir "$(grep ^uv== requirements/tfx-1.16-py310.txt)" \
 && /opt/rowstep/bin/uv pip sync --no-cache --python /opt/rowstep/bin/python \
      requirements/tfx-1.16-py310.txt
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY optimizers optimizers
COPY components components
COPY pipeline pipeline
RUN /opt/rowstep/bin/uv pip install --no-cache --no-deps --no-build-isolation \
      --python /opt/rowstep/bin/python .

FROM ${BASE}
RUN useradd --create-home --uid 1000 rowstep \
 && install --directory --owner rowstep --group rowstep /home/rowstep/.rowstep
COPY --from=build /opt/rowstep /opt/rowstep
# The configs that the wheel carries, where a first `rowstep run quickstart.yaml` finds them.
COPY --chown=rowstep:rowstep configs/*.yaml /home/rowstep/
ENV PATH=/opt/rowstep/bin:$PATH \
    MPLBACKEND=Agg \
    PYTHONUNBUFFERED=1
USER rowstep
WORKDIR /home/rowstep
VOLUME /home/rowstep/.rowstep
ENTRYPOINT ["rowstep"]
CMD ["--help"]
