"""Reading ``config.pbtxt``: protobuf's text format of a model's configuration."""

from google.protobuf import text_format

from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.errors import invalid_input


def parse_config_text(content: bytes) -> ModelConfig:
    """Read a configuration.

    Raises:
        ServeError: invalid_input, with line and column of what is not understood.
    """
    try:
        return text_format.Parse(content.decode(), ModelConfig())
    except UnicodeDecodeError:
        raise invalid_input("is not a text in UTF-8") from None
    except text_format.ParseError as error:
        # The names of our messages say nothing to whoever wrote the file.
        raise invalid_input(" ".join(str(error).replace("inference.", "").split())) from None
