#ifndef SDQUANT_MODULE_ATTENTION_H
#define SDQUANT_MODULE_ATTENTION_H

PyObject *py_attend(PyObject *module, PyObject *bytes);

#define ATTENTION_METHODS                                                                                    \
    {"attend", py_attend, METH_O, "attend(numbers)\n--\n\nSee attention.h."}

#endif
