"""The op list: one schema a line, defined in every kernel backend's namespace, compiled extension or not.

seed        one int64 element on x's device; None where p is 0 or 1
origin      (plane0, row0, col0), added to a mask's index (see mask.py)
dbias dw db the statistics' dtype (float32, float64 for float64), shape [0] where not asked for
"""

SCHEMAS = (
    "dropout_mask(Tensor seed, SymInt[] shape, float p, int stream, int[] origin) -> Tensor",
    "dropout_fwd(Tensor x, Tensor? seed, float p, int stream, int[] origin) -> Tensor",
    "act_dropout_fwd(Tensor x, Tensor? bias, str act, Tensor? seed, float p, int stream, int[] origin) -> Tensor",
    "act_dropout_bwd(Tensor dy, Tensor x, Tensor? bias, str act, Tensor? seed, float p, int stream, int[] origin, bool need_dbias) -> (Tensor dx, Tensor dbias)",
    "dropout_add_fwd(Tensor x, Tensor residual, Tensor? bias, Tensor? seed, float p, int stream, int[] origin) -> Tensor",
    "dropout_add_bwd(Tensor dy, Tensor? seed, float p, int stream, int[] origin, bool need_dbias) -> (Tensor dx, Tensor dbias)",
    "layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, SymInt[] normalized_shape, float eps) -> (Tensor y, Tensor mean, Tensor rstd)",
    "layer_norm_bwd(Tensor dy, Tensor saved, Tensor? mean, Tensor? rstd, Tensor? weight, Tensor? bias, SymInt[] normalized_shape, bool from_output, bool need_dx, bool need_dw, bool need_db) -> (Tensor dx, Tensor dw, Tensor db)",
    "rms_norm_fwd(Tensor x, Tensor? weight, SymInt[] normalized_shape, float eps, float offset) -> (Tensor y, Tensor rstd)",
    "rms_norm_bwd(Tensor dy, Tensor saved, Tensor rstd, Tensor? weight, SymInt[] normalized_shape, float offset, bool from_output, bool need_dx, bool need_dw) -> (Tensor dx, Tensor dw)",
    "dropout_add_layer_norm_fwd(Tensor x, Tensor residual, Tensor? input_bias, Tensor? weight, Tensor? bias, SymInt[] normalized_shape, float eps, Tensor? seed, float p, int stream, int[] origin) -> (Tensor y, Tensor r, Tensor mean, Tensor rstd)",
    "dropout_add_layer_norm_bwd(Tensor dy, Tensor? dr, Tensor r, Tensor mean, Tensor rstd, Tensor? weight, SymInt[] normalized_shape, Tensor? seed, float p, int stream, int[] origin, bool need_dw, bool need_db, bool need_dinput_bias) -> (Tensor dx, Tensor dresidual, Tensor dw, Tensor db, Tensor dinput_bias)",
    "dropout_add_rms_norm_fwd(Tensor x, Tensor residual, Tensor? input_bias, Tensor? weight, SymInt[] normalized_shape, float eps, float offset, Tensor? seed, float p, int stream, int[] origin) -> (Tensor y, Tensor r, Tensor rstd)",
    "dropout_add_rms_norm_bwd(Tensor dy, Tensor? dr, Tensor r, Tensor rstd, Tensor? weight, SymInt[] normalized_shape, float offset, Tensor? seed, float p, int stream, int[] origin, bool need_dw, bool need_dinput_bias) -> (Tensor dx, Tensor dresidual, Tensor dw, Tensor dinput_bias)",
    "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, int causal, float scale, Tensor? seed, float p, int stream, int[] origin, int heads_total) -> (Tensor o, Tensor lse)",
    "attention_bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? attn_mask, int causal, float scale, Tensor? seed, float p, int stream, int[] origin, int heads_total) -> (Tensor dq, Tensor dk, Tensor dv)",
)
